"""The command `kvserve`: words and figures for a person or, with `--json`, for a program. It starts what `app/` joins,
asks a running server over HTTP, and reads what lies on this machine."""
