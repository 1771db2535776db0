"""Measurements that need the source tree: `splitveil bench`, and one script for each published table."""
