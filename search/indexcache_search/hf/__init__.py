"""Models and tokenizers of Hugging Face transformers, and what they run on."""
