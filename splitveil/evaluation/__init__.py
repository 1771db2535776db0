"""What a trained run leaks: attacks on it, judges, certificates, the worst case, flags and the summary of all that."""
