"""What a user of this program writes; nothing else of it depends on these."""
