"""Several processes as one program: how they start, what they tell each other, and what is whole on each."""
