"""What a person sees of the server: the terminal and the trace files. It changes nothing that it reports on."""
