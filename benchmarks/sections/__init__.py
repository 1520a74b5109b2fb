"""The sections of docs/performance.md, each made of the newest runs of one benchmark."""
