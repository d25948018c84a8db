"""Base: errors, checks of arguments, atomic files, interrupts, output streams."""
