"""A real model on real sentences: all-MiniLM-L6-v2 over `flash_attention`."""
