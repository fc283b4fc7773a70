-- Publish results and acknowledge their inputs, each pair as one unit, if the lease is still held.
-- KEYS: input stream, output stream.  ARGV: group, consumer, then (input id, schema, payload) triples;
-- an empty payload acknowledges without publishing.  Returns 1 (done) or 0 (lease lost) for each triple.
local done = {}
for i = 3, #ARGV, 3 do
  local held = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2])
  if #held == 1 then
    if ARGV[i + 2] ~= '' then
      redis.call('XADD', KEYS[2], '*', 'v', ARGV[i + 1], 'p', ARGV[i + 2])
    end
    redis.call('XACK', KEYS[1], ARGV[1], ARGV[i])
    done[#done + 1] = 1
  else
    done[#done + 1] = 0
  end
end
return done
