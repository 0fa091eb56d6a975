"""Programs that show the package at work: the fine-tuning recipe and its parts."""
