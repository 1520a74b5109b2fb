"""The settings tree: one dataclass field per setting, with its option, environment variable, YAML key and help.

`ClusterSettings` is the root; its branches are `served`, `secrets`, `router`, `worker`, `engine` and `planner`. The
controller passes each process its branches, together with values that are no settings (addresses, ids); see
`RouterConfig`, `WorkerConfig` and `EngineConfig`.
"""
