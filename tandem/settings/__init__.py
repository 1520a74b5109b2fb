"""The settings tree: one dataclass field per setting, with its option, environment variable, YAML key and help.

`ClusterSettings` is the root; its branches are `router`, `worker`, `engine` and `planner`. The controller passes each
process its branch, together with values that only the controller has (addresses, ids, secrets); see `RouterConfig`,
`WorkerConfig` and `EngineConfig`.
"""
