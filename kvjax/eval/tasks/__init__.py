"""Sources of questions, and the grading of answers."""
