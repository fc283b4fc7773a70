-- Keep the result of one sample of a group; acknowledge its trajectory unless it is the last one.
-- The last one stays pending until the whole group is published, so that another worker can take it over.
-- Atomic against other samples of the group that are scored at once: exactly one of them is the last.
-- KEYS: trajectories, results, tickets.
-- ARGV: group, consumer, entry_id, ticket, index, group_size, payload.
-- `tickets` are those with results. An empty payload: the result is there already.
-- Returns 0 lease lost, 1 kept and acknowledged, or the payloads of the group, which this consumer has to finish.
local held = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1, ARGV[2])
if #held == 0 then
  return 0
end
if redis.call('HEXISTS', KEYS[2], 'published') == 0 then
  -- Before the result: only by this set does the trainer find groups that no worker finishes.
  redis.call('SADD', KEYS[3], ARGV[4])
  if ARGV[7] ~= '' then
    redis.call('HSETNX', KEYS[2], ARGV[5], ARGV[7])
  end
  local last = redis.call('HGET', KEYS[2], 'last')
  -- `last` is the only field that is no index.
  local num_results = redis.call('HLEN', KEYS[2]) - (last and 1 or 0)
  if num_results >= tonumber(ARGV[6]) then
    if not last then
      redis.call('HSET', KEYS[2], 'last', ARGV[3])
      last = ARGV[3]
    end
    -- Also for the worker that takes it over: it finishes the group from the same payloads.
    if last == ARGV[3] then
      local payloads = {}
      for i = 0, tonumber(ARGV[6]) - 1 do
        payloads[i + 1] = redis.call('HGET', KEYS[2], i)
      end
      return payloads
    end
  end
end
-- Not the last one, or a copy that came after its group was published: nothing is left to do.
redis.call('XACK', KEYS[1], ARGV[1], ARGV[3])
return 1
