"""What is learned: problems with answers that can be verified, and demonstrations for the SFT start."""
