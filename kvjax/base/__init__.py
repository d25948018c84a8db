"""Base: errors, checks of arguments, files that appear whole or not at all, interrupts, output streams."""
