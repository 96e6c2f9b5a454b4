"""What one does with a trained model: talk to it, have it complete a file, compare it with where it came from."""
