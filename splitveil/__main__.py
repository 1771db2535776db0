"""The command line: a dict from command to function. Nothing here imports torch; the functions live in commands.py."""

import errno
import os
import sys
from typing import NoReturn

from splitveil.registry import UserError, unknown

COMMANDS = {
    "demo": "three split models, undefended, noisy and defended, attacked and reported (3 to 4 minutes on 2 cores)",
    "run": "train + attack + evaluate + report: run [RECIPE.toml] [flags] [--suite quick]",
    "train": "train a split model: train [RECIPE.toml] [flags]; the same command resumes it",
    "attack": "attack a trained run: attack RUN… [--attacks a,b] [--suite quick|standard|plus]",
    "evaluate": "accuracy, leak, cost and flags of an attacked run: evaluate RUN… [--fail-if 'ssim>0.5']",
    "report": "one HTML file from one or more runs: report RUN… [--out FILE]",
    "list": "what there is: surrogates, defences, attacks, models, data sets",
    "bench": "what a step, a surrogate and a refresh cost, as ratios: bench [--only A,B] [--against FILE]",
    "data": "read, check and, if asked, download a data set: data check|prepare NAME [flags]",
}


def usage() -> str:
    lines = [f"  {name:<10}{what}" for name, what in COMMANDS.items()]
    return "\n".join(
        ["usage: splitveil COMMAND …", "", *lines, "", "`splitveil COMMAND --help` lists every flag of a command."]
    )


def dispatch(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return
    if arguments[0] in ("-V", "--version"):
        from splitveil import __version__

        print(f"splitveil {__version__}")
        return
    if arguments[0] not in COMMANDS:
        raise unknown("command", arguments[0], COMMANDS)
    from splitveil.cli import commands

    getattr(commands, f"{arguments[0]}_command")(arguments[1:])


def main(arguments: list[str] | None = None) -> None:
    """Run a command; a user's mistake is one line on stderr and exit code 2."""
    try:
        dispatch(sys.argv[1:] if arguments is None else arguments)
    except UserError as error:
        fail(str(error))
    except BrokenPipeError:  # whoever read our output, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            fail(
                f"the disk is full ({error.filename or 'while writing'}); free some space, the same command goes on from there"
            )
        if error.errno is None or error.filename is None:
            raise
        fail(
            f"{error.filename}: {os.strerror(error.errno)}; check the path and its permissions, --runs chooses another folder"
        )
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last checkpoint", file=sys.stderr)
        sys.exit(130)


def fail(message: str) -> NoReturn:
    print("splitveil:", " ".join(message.splitlines()), file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
