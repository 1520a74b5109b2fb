"""The settings tree: each setting is one field, of which option, variable, YAML key, help and docs are made.

`ClusterSettings` is the root; its branches are `router`, `worker`, `engine` and `planner`. The controller hands each
process its branch, together with what only the controller knows (addresses, ids, secrets), see `RouterConfig`,
`WorkerConfig` and `EngineConfig`.
"""
