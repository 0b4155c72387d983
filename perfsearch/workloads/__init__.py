"""What is trained: model, data, loss and optimizer."""
