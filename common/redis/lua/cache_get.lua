-- Get one cached reward, or nil; this counts as a use. Atomic against a `cache_put` that drops it.
-- KEYS: rewards, uses, totals.
-- ARGV: digest.
-- `uses` has when each was used, and `totals` the size and the clock.
local value = redis.call('HGET', KEYS[1], ARGV[1])
if value then
  redis.call('ZADD', KEYS[2], redis.call('HINCRBY', KEYS[3], 'clock', 1), ARGV[1])
end
return value
