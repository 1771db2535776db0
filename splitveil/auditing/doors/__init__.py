"""Doors: one file for each kind of thing that can be audited. Each turns it into a Subject (`splitveil.auditing.subject`)."""
