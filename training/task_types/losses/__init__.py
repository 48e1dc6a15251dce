"""Losses: functions of logits and labels, one family a module."""
