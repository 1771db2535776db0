"""The command line. Nothing here imports torch: cli/command_flags.py names the commands, cli/commands.py does their work."""

import sys

from splitveil.cli.command_flags import COMMANDS, HELP, IMPORT, command_help, take_flags, usage
from splitveil.cli.mistakes import one_line
from splitveil.own_code import import_methods
from splitveil.registry import unknown


def dispatch(arguments: list[str]) -> None:
    if not arguments or arguments[0] in (*HELP, "help"):
        print(usage())
        return
    if arguments[0] in ("-V", "--version"):
        from splitveil import __version__

        print(f"splitveil {__version__}")
        return
    command, *rest = arguments
    if command not in COMMANDS:
        raise unknown("command", command, COMMANDS)
    if HELP & set(rest) and command in ("attack", "evaluate", "report", "verify", "sign", "list"):
        print(command_help(command))
        return
    own, rest = take_flags([IMPORT], rest)
    import_methods(own["--import"])
    from splitveil.cli import commands

    getattr(commands, f"{command}_command")(rest)


def main(arguments: list[str] | None = None) -> None:
    """Run a command; a user's mistake is one line on stderr and exit code 2."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        with one_line("splitveil", lambda: elsewhere(given)):
            dispatch(given)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last checkpoint, or the last finished attack", file=sys.stderr)
        sys.exit(130)


def elsewhere(arguments: list[str]) -> str:
    """Which flag of the command makes it write somewhere else."""
    flags = COMMANDS[arguments[0]].flags if arguments and arguments[0] in COMMANDS else ()
    flag = next((flag for flag in flags if flag.name in ("--runs", "--out")), None)
    return "" if flag is None else f", {flag.name} chooses another {'folder' if flag.value == 'DIR' else 'file'}"


if __name__ == "__main__":
    main()
