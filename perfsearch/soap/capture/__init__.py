"""From a PyTorch model and loss to the graph that is planned."""
