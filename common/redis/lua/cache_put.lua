-- Keep one reward; make room by dropping the least recently used ones. Atomic against other workers that put rewards:
-- the size is exact.
-- KEYS: rewards, uses, totals.
-- ARGV: digest, payload, max_bytes.
local old = redis.call('HGET', KEYS[1], ARGV[1])
local num_bytes = #ARGV[1] + #ARGV[2] - (old and #ARGV[1] + #old or 0)
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], redis.call('HINCRBY', KEYS[3], 'clock', 1), ARGV[1])
local total = redis.call('HINCRBY', KEYS[3], 'bytes', num_bytes)
while total > tonumber(ARGV[3]) do
  local oldest = redis.call('ZPOPMIN', KEYS[2])[1]
  -- Size and set disagree where a key was deleted by hand: there is nothing more to drop.
  if not oldest then
    break
  end
  local value = redis.call('HGET', KEYS[1], oldest)
  redis.call('HDEL', KEYS[1], oldest)
  total = redis.call('HINCRBY', KEYS[3], 'bytes', -(#oldest + (value and #value or 0)))
end
