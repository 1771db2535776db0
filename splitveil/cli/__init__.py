"""The command line: flags, commands, and the demo."""
