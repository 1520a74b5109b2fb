"""A cluster that is started and stopped from outside: a separate process, so that its Ray is separate, too.

It takes one JSON line with settings of `ClusterSettings` on stdin, prints one with the `Endpoints` once it serves, and
stops, leaving nothing running, when stdin closes.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from tandem.cluster.launcher import Cluster
from tandem.settings.cluster import ClusterSettings


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    paths = {name: Path(settings[name]) for name in ("model", "log_folder")}
    cluster = Cluster.start(ClusterSettings.of(**{**settings, **paths}))
    print(json.dumps(asdict(cluster.endpoints)), flush=True)
    sys.stdin.read()
    cluster.stop()


if __name__ == "__main__":
    main()
