-- Renew the leases of requests that are still in flight.  What ran out stays gone.
-- KEYS: sorted set of requests in flight.  ARGV: lease in ms, request ids.
local time = redis.call('TIME')
local ends = time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[1])
for i = 2, #ARGV do
  redis.call('ZADD', KEYS[1], 'XX', ends, ARGV[i])
end
return 1
