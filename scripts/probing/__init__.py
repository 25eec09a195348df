"""What the probe scripts share: an HTTP client, the shapes of agents' requests, and the report of expectations."""
