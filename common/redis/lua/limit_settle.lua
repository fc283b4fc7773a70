-- End requests: free their places, and put right what was estimated of their tokens.
-- KEYS: hash of what is left, sorted set of requests in flight.
-- ARGV: (request id, tokens to give back, below zero where more were used) pairs.
-- A request whose lease ran out, or that was settled before, changes nothing.
for i = 1, #ARGV, 2 do
  if redis.call('ZREM', KEYS[2], ARGV[i]) == 1 and redis.call('HEXISTS', KEYS[1], 'tokens') == 1 then
    redis.call('HINCRBYFLOAT', KEYS[1], 'tokens', ARGV[i + 1])
  end
end
return 1
