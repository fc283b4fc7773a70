"""Right, wrong and hostile answers, with the score that each must earn, beside the graders of others."""
