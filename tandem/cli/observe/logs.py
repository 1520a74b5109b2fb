"""`tandem logs`: prints the logs of this host's processes."""

from typing import Annotated

import typer

from tandem.cli.plain_errors import plain_errors

LOOK_S = 0.5


@plain_errors
def logs(
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow new lines, also of clusters that start later.")
    ] = False,
) -> None:
    """Print the logs of all processes of the newest start on this host: router, controller, workers."""
    import time

    from tandem.cli.observe.log_folder import log_root
    from tandem.cli.observe.log_tail import LogTail
    from tandem.protocol.errors import NotFound

    root = log_root()
    tail, any_lines = LogTail(root), False
    while True:
        for line in tail.lines():
            any_lines = True
            print(line)
        if not follow:
            break
        print(end="", flush=True)
        time.sleep(LOOK_S)
    if not any_lines:
        raise NotFound(f"no process of a cluster has logged under {root}; `tandem up` starts one")
