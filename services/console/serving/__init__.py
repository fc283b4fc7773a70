"""`tidemill serve-rewards`: the rewards of a config for a trainer that is not ours."""
