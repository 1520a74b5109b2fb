"""The `tandem` command: one file a command, and nothing imported before it is needed."""
