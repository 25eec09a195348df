"""What a person sees of the server: terminal, trace files, numbers, reports. It changes nothing that it reports on."""
