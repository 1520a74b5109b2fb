"""`tandem bench`: open-loop load against any server, by gRPC or OpenAI's HTTP API."""
