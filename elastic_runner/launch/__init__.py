"""The node's side: starts workers and restarts them."""
