"""Report."""


def write_report(folders, out):
    return out
