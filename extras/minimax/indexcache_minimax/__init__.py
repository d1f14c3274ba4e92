"""Which of MiniMax-M3's layers choose blocks, and which reuse a choice: a family, and its reference engine."""
