"""Models and tokenizers of Hugging Face transformers, and the devices they run on."""
