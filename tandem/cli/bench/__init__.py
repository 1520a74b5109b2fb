"""`tandem bench`: open-loop load against any server, over gRPC or OpenAI's HTTP API."""
