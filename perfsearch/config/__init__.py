"""What a search is told: settings, how they are composed, and messages on what is wrong."""
