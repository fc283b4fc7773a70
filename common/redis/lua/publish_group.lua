-- Publish all scores of a group, acknowledge its last trajectory and drop its results, as one unit, if the
-- lease is still held. The field `published` stays: it keeps a late duplicate from starting the group again.
-- Atomic against a worker that takes the trajectory over, and would publish the group a second time.
-- KEYS: trajectories, scores, results.
-- ARGV: group, consumer, entry_id, schema, payloads...
-- Returns 1 published or 0 lease lost.
local held = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1, ARGV[2])
if #held == 0 then
  return 0
end
for i = 5, #ARGV do
  redis.call('XADD', KEYS[2], '*', 'v', ARGV[4], 'p', ARGV[i])
end
-- After the scores, as in complete.lua.
redis.call('XACK', KEYS[1], ARGV[1], ARGV[3])
redis.call('DEL', KEYS[3])
redis.call('HSET', KEYS[3], 'published', 1)
return 1
