"""What two runs computed, side by side: metrics, gradients and parameters, and the verdict on their difference."""
