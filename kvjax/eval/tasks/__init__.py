"""Where questions come from, and how their answers are graded."""
