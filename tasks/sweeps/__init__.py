"""Sweeps: the study of trials, the sampler that proposes settings, and the pruner that stops trials early."""
