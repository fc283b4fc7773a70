-- End, renew and admit requests under the limits of a run, in one unit: what one worker frees is drawn only
-- once. Limits: concurrency, requests and tokens per minute; 0 is none. Time is the server's.
-- KEYS: levels, in_flight.
-- ARGV: lane, lease_ms, concurrency, requests_per_minute, tokens_per_minute, burst_ms, evaluation_share, worker,
--   num_evaluations, num_ended, num_renewed, ended... (id, tokens), renewed..., waiting... (id, tokens).
-- `levels` is a hash of what is left, `in_flight` a sorted set of requests by the end of their lease. The lane is eval
-- or train; training leaves `evaluation_share` to evaluation, and `num_evaluations` wait at this worker. Of requests
-- that ended come the tokens to give back, below zero where more were used. Waiting ones are in order.
-- Returns how many waiting requests are admitted, and milliseconds after which to ask for the next one; -1
-- where that depends on a request that ends.  Asking twice for the same request draws once.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local is_eval = ARGV[1] == 'eval'
local lease_ms, concurrency = tonumber(ARGV[2]), tonumber(ARGV[3])
local burst_ms, share = tonumber(ARGV[6]), tonumber(ARGV[7])
-- First remove expired leases: a request that outlived its lease has no effect any more.
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
-- No lease ends later than one lease from now, unless the clock was set back since: then it begins again.
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. now + lease_ms, '+inf')) do
  redis.call('ZADD', KEYS[2], now + lease_ms, id)
end
local first_renewed = 12 + 2 * tonumber(ARGV[10])
local first_waiting = first_renewed + tonumber(ARGV[11])
for i = 12, first_renewed - 1, 2 do
  -- Only where it is still there: a repeated call gives nothing back twice. A bucket that is missing is full.
  if redis.call('ZREM', KEYS[2], ARGV[i]) == 1 and redis.call('HEXISTS', KEYS[1], 'tokens') == 1 then
    redis.call('HINCRBYFLOAT', KEYS[1], 'tokens', ARGV[i + 1])
  end
end
for i = first_renewed, first_waiting - 1 do
  -- XX: a request whose lease has expired has no place any more, and gets none by a renewal.
  redis.call('ZADD', KEYS[2], 'XX', now + lease_ms, ARGV[i])
end
-- While evaluation waits at any worker, only evaluation is admitted: until that worker reports that none waits any
-- more, or has reported nothing for `eval_ms`.
local own, num_evals, eval_ms = 'eval:' .. ARGV[8], tonumber(ARGV[9]), 5000
if num_evals == 0 then
  redis.call('HDEL', KEYS[1], own)
end
if first_waiting > #ARGV then
  return {0, 0}
end
if not is_eval then
  local found = redis.call('HGETALL', KEYS[1])
  for i = 1, #found, 2 do
    if string.sub(found[i], 1, 5) == 'eval:' then
      local left_ms = tonumber(found[i + 1]) - now
      if left_ms > 0 and left_ms <= eval_ms then
        return {0, left_ms}
      end
      redis.call('HDEL', KEYS[1], found[i])
    end
  end
end

local places = concurrency
if concurrency > 0 and not is_eval then
  places = math.max(1, concurrency - math.ceil(concurrency * share))
end

-- Buckets: `level` is left of `capacity`, filled at `per_ms`; training leaves `floor` to evaluation.
local function bucket(name, per_minute, largest)
  if per_minute <= 0 then
    return nil
  end
  local per_ms = per_minute / 60000
  local capacity = math.max(per_ms * burst_ms, largest)
  local found = redis.call('HMGET', KEYS[1], name, name .. '_at')
  -- A clock that was set back fills nothing, and takes nothing away.
  local level = found[1] and tonumber(found[1]) + math.max(0, now - tonumber(found[2])) * per_ms or capacity
  return {name = name, per_ms = per_ms, capacity = capacity, level = math.min(level, capacity),
    floor = is_eval and 0 or capacity * share}
end
local requests = bucket('requests', tonumber(ARGV[4]), 1)
local tokens = bucket('tokens', tonumber(ARGV[5]), 0)

-- Milliseconds until `cost` can be drawn from a bucket. A full one always suffices, and may then go below zero.
local function missing_ms(found, cost)
  if not found then
    return 0
  end
  local missing = math.min(cost + found.floor, found.capacity) - found.level
  return missing <= 1e-6 and 0 or math.max(1, math.ceil(missing / found.per_ms))
end

local in_flight = redis.call('ZCARD', KEYS[2])
local admitted, wait_ms = 0, 0
for i = first_waiting, #ARGV, 2 do
  local id, cost = ARGV[i], tonumber(ARGV[i + 1])
  if not redis.call('ZSCORE', KEYS[2], id) then
    wait_ms = math.max(missing_ms(requests, 1), missing_ms(tokens, cost))
    if wait_ms == 0 and concurrency > 0 and in_flight >= places then
      wait_ms = -1
    end
    if wait_ms ~= 0 then
      -- In order: small requests must not pass a large one again and again.
      break
    end
    redis.call('ZADD', KEYS[2], now + lease_ms, id)
    in_flight = in_flight + 1
    if requests then requests.level = requests.level - 1 end
    if tokens then tokens.level = tokens.level - cost end
  end
  admitted = admitted + 1
end
for _, found in pairs({requests, tokens}) do
  redis.call('HSET', KEYS[1], found.name, tostring(found.level), found.name .. '_at', now)
end
if is_eval then
  if wait_ms == 0 and num_evals == 1 then
    redis.call('HDEL', KEYS[1], own)
  else
    redis.call('HSET', KEYS[1], own, now + eval_ms)
  end
end
return {admitted, wait_ms}
