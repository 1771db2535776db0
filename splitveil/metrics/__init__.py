"""Metrics: how close a reconstruction is (image), and what the halves of a split model cost (cost)."""
