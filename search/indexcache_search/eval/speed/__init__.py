"""Speed of patterns: timed on SGLang's servers, in turns, or estimated by measured tables."""
