"""What a rank runs: the only part of this program that imports torch and deepspeed."""
