"""Losses: functions of logits and labels, one family a module."""

TEACHER = "teacher"
"""The column with the outputs of a teacher: a list of numbers for each row, of a row of words those of each word, one
after another."""
