"""Speed of patterns: timed on SGLang's servers, in turns, or estimated by measured tables.

`turns` times, `timed_request` sends; `servers`, `prompt_times` and `estimate` say of what. Commands find `speeds` and
`options`.
"""
