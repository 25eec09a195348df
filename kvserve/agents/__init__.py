"""The store of agents whose history the server keeps."""
