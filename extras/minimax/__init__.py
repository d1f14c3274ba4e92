"""MiniMax-M3, which shares choices of blocks over layers, and its tests."""
